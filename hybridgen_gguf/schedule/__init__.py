"""Many requests over one pool of KV cells: what runs when. Pure: no engine, no clock, no threads.

cells      who holds which cells, shared ones counted once
prefix     which sequence holds or computes which beginning of a prompt
times      how long a step takes: predicted, then corrected
job        what is known of a request; what a step is; what a user may set
scheduler  which requests run, and what the next step does
"""

from .job import Action, Job, Part, Rules, Step
from .scheduler import Scheduler, never_fits
from .times import UNKNOWN, Rates, StepTimes

__all__ = ["UNKNOWN", "Action", "Job", "Part", "Rates", "Rules", "Scheduler", "Step", "StepTimes", "never_fits"]
