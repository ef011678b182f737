"""Messages → tokens.

encode        raw text or messages to tokens; user text never becomes a control token
template      which chat template is used, and rendering it in a child process
render_child  that child: jinja2 in a sandbox, with limits on time, memory and output
templates/    templates for files that bring none
"""

from .encode import Message, Prompt, encode_chat, encode_raw

__all__ = ["Message", "Prompt", "encode_chat", "encode_raw"]
