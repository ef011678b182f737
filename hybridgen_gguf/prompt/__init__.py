"""Messages → tokens.

encode        raw text or messages to tokens; user text never becomes a control token
control       text that spells control tokens, and the stand-ins that keep it text
messages      what a caller may say: OpenAI's keys, each carried on or refused by name
template      which chat template is used
renderer      rendering it in a child process, in the form that it wants
forms         how a conversation is written down: text or parts, arguments as objects or JSON
fitting       which form loses nothing, and what is lost if none does; survival: of single texts
probes        what a template tells about answers: their ends, and the marks around thoughts
reasoning     thoughts and answer apart, by those marks
render_child  the child: jinja2 in a sandbox, with limits on time, memory and output
templates/    templates for files that bring none
"""

from .encode import Message, Prompt, encode_chat, encode_raw

__all__ = ["Message", "Prompt", "encode_chat", "encode_raw"]
