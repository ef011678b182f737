"""Many requests answered at once on one engine thread.

tasks     what is done with the logits of a request: an answer, a prefix that is read ahead, a judgement
loop      the engine's thread: the scheduler's steps on the context, results to whoever waits
requests  batch and score, as a part of LanguageModel
many      files of prompts and of texts to judge through one loop
streams   what a caller holds: chunks of one answer, for threads and for asyncio
"""

from .loop import Batching, BatchLoop, Counts
from .many import Done, Score, answers, ordered, scores
from .requests import ManyRequests
from .streams import Stream

__all__ = ["BatchLoop", "Batching", "Counts", "Done", "ManyRequests", "Score", "Stream", "answers", "ordered", "scores"]
