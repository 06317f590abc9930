"""Computes rewards of responses. User functions are called in worker processes by `Form.call`.

::

    the run's process                           a worker process, one of several
    terms      parses `env.reward`              worker     the program: reads requests, answers
    scoring    a step's responses in,             form     the function's arguments, by their names
               rewards and failures out           call     the call: a value, or how it failed
      pool     assigns calls to workers;
               starts, replaces and ends them
          |                                         |
          +-- channel: Load, Calls -------------->--+
                       an answer for each call --<--+

`pool` enforces `env.reward_timeout`: a worker that does not answer in time is ended. `worker` sets
`env.reward_memory_gb` for itself, and ends when the run's process ends, however it ends.
`terms.PLAIN` rewards, which only compare texts, are called by `scoring` in the run's process.

The built-in rules are `final_number` (gsm8k) and `math_answer` (math_equal). Both find the answer
by `answer_part`, take it apart by `answer_form`, and read numbers by `written_number`. Read `terms`
and `scoring` first. Importing this package does not load JAX, which workers do not need. Not done:
functions that compare the responses of a batch with each other.
"""
