"""Granite 3 and ERNIE 4.5 Thinking.

Source: the chat templates of ibm-granite/granite-3.3-8b-instruct and baidu/ERNIE-4.5-21B-A3B-Thinking (`<think>` tags,
then the answer in `<response>` tags), and of ibm-granite/granite-3.2-8b-instruct (two sentences).
"""

from tercet.frontend.parsers.reasoning.generic import Tags, tagged

FORMAT = tagged(Tags(begin="<think>", end="</think>", answer=("<response>", "</response>")))
GRANITE_32 = tagged(Tags(begin="Here is my thought process:", end="Here is my response:"))
