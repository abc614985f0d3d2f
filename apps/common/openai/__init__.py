"""OpenAI's API as far as Stoker has it: what a request may ask, how a model answers it, and the forms of answers.

request.py   a request that can be answered, and an error as OpenAI words it
bodies.py    what a request's body may ask for; everything else is refused
writing.py   how a model answers: runs in library processes
answers.py   the bodies of answers
"""
