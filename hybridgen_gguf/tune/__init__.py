"""The fastest settings for a model on this machine, by measuring around the plan.

search  which settings are tried, in which order, and when to stop
places  other placements worth a trial
meter   one trial: the engine opened with a setting and timed
"""
