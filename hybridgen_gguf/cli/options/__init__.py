"""Every flag, once: name, alias, environment variables, panel, help. Commands take groups of flags as dataclasses.

llama.cpp's flags keep llama.cpp's names; its environment variables are read after our own. Knows no engine, no model.
Invariant: a flag defined here appears in `--help`, in docs/cli.md and in the configuration file under the same name.

spread   how a flag is declared, and how a command takes groups of them
model    which model
change   what of the model is other than in its file
place    what lies and runs where
prompt   what to ask, whether to think, when to stop
sample   how a token is chosen
output   what is printed
make     convert, quantize, imatrix, validate
measure  profile, tune, doctor
bench    bench, bench attention
batch    batch, score
"""

from .batch import AnswerFlags, DefaultSampleFlags, LineFlags, ScoreFlags, TemplateFlag
from .bench import AttentionBenchFlags, BenchFlags
from .make import ConvertFlags, ImatrixFlags, QuantizeFlags, ReadingFlags, ReportFlags, ValidateFlags
from .measure import DoctorFlags, ProfileFlags, TuneFlags
from .model import ModelFlags
from .output import JsonFlag, PlanOutput, RunOutput
from .place import PlaceFlags
from .prompt import PromptFlags, ThinkFlags
from .sample import SampleFlags
from .spread import takes

__all__ = [
    "AnswerFlags",
    "AttentionBenchFlags",
    "BenchFlags",
    "ConvertFlags",
    "DefaultSampleFlags",
    "DoctorFlags",
    "ImatrixFlags",
    "JsonFlag",
    "LineFlags",
    "ModelFlags",
    "PlaceFlags",
    "PlanOutput",
    "ProfileFlags",
    "PromptFlags",
    "QuantizeFlags",
    "ReadingFlags",
    "ReportFlags",
    "RunOutput",
    "SampleFlags",
    "ScoreFlags",
    "TemplateFlag",
    "ThinkFlags",
    "TuneFlags",
    "ValidateFlags",
    "takes",
]
