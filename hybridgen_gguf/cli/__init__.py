"""The command line. Imports stay light: a verb's modules are imported when it runs.

app        the verbs, errors and exit codes; start here
options    every flag, once
arguments  flags → Limits, SampleOptions, a question
config     the configuration file
show       stdout, stderr, tables, progress
run        run, plan, bench
files      inspect, validate, pull, models, engine
make       convert, quantize, imatrix
measure    profile, tune, doctor, over measuring
bench      bench attention
"""
