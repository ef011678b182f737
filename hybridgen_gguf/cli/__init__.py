"""The command line. Imports stay light: a verb's modules are imported when it runs.

app        the verbs and exit codes; start here
llama_flags  llama.cpp's flags that are not ours
slips      what went wrong, in our words
options/   every flag, once
arguments  flags → Limits, SampleOptions, a question
changes    flags that change the model
config     the configuration file
show       stdout, stderr, tables, progress
run        run, plan, bench
files      inspect, validate, pull, models, engine
make       convert, quantize, imatrix
measure    profile, tune, doctor
thinking   what the flags about thinking mean
environment  variables that no flag has
bench      bench attention
"""
