"""Studies: measurements that test hypotheses written beforehand (docs/studies.md).

::

    config or checkpoint -> subjects.Subject (one for each seed)
                                |  cells(subject, plan)
    STUDY.jsonl.gz <-> Cells    |  step0.Scoring: samples, scored under several recipes
                                |  runs.arm_cells: RL runs from one start
                                v
    frame.Found (numbers) -> judge: hypotheses, by statistics and measures
                          -> result, tables, figure -> study.json, study.md, study.png

Words: a *subject* is a trained model of one seed, with its task; a *cell* a measurement that is
made once and kept in a file; a *view* a recipe (with or without routing replay) under which samples
are scored; an *arm* an RL run of a subject with some fields changed; a *rung* a model of `scale`'s
ladder; a *zone* the range in which a hypothesis wants its figure; *D* a token's log-probability of
the learner minus that of the rollout.

Read `frame` first: it has the form of a study, and the one loop that runs it. Each study is the
value STUDY of a module: `cases`, `kv`, `scale`, `training`, `accuracy`, `recipes`,
`gradients`, `staleness`. `writing` has tables and panels, `scoring` samples and scores,
`outliers` what one study measures.

Studies use only public names of the library. Not done: a study over several processes, and one
that compares engines other than this library's.
"""
