"""Files of requests, a JSON object a line: what is asked, what is answered, and an output that survives interruptions.

source   the input's lines, each with its number and digest
body     the body of OpenAI's requests → what is to be written
wire     replies and errors → OpenAI's objects
sink     the output: whole lines or nothing, and going on after an interruption
"""
