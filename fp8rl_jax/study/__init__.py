"""Studies: measurements that test hypotheses written beforehand (docs/studies.md).

`statistics` has intervals and tests, `cells` the results that are kept, `hypotheses` the verdicts,
`writing` the files; every study has a file of its own.
"""
