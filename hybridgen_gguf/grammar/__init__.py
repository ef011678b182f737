"""What an answer may look like: a grammar (GBNF) or a JSON schema, checked in a child, then followed token by token.

schema   a JSON schema in the form that the engine takes, and what of it has no effect
check    text → grammar, or one line that says what is wrong and where
guard    which tokens may come next: none of thoughts are refused, all of the answer's are by the grammar
"""

from .check import checked
from .guard import Guard

__all__ = ["Guard", "checked"]
