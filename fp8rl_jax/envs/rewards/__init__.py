"""Rewards of responses. A user's function is called in a worker process, by `form.Form.call`.

    the run's process                           a worker process, one of several
    terms      what `env.reward` names          worker     the program: reads requests, answers
    scoring    a step's responses in,             form     the function's arguments, by their names
               rewards and failures out           call     the call: a value, or how it failed
      pool     which worker gets which call;
               starts, replaces and ends them
          |                                         |
          +-- channel: Load, Calls -------------->--+
                       an answer for each call --<--+

`pool` keeps `env.reward_timeout`: it waits so long for an answer, then ends the worker. `worker`
sets `env.reward_memory_gb` for itself, and ends with the run's process, however that ends.
`terms.PLAIN` rewards, which only compare texts, are called by `scoring` in the run's process.

What a right answer is: `final_number` (gsm8k) and `math_answer` (math_equal), which both read
numbers by `written_number`. Importing this room loads no JAX, which workers do without.
"""
