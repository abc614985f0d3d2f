"""Soft-prompt tuning inside a library process, on one device or on a gang of them.

job.py         what a user asks for (Table 3), and `job.toml`
samples.py     pairs of input and target, and their parts
encoding.py    samples and prompts as tokens; what is too long for the model
batches.py     which samples an iteration is of, and which a rank computes
softprompt.py  PEFT's soft prompt on a context's model, and off it again
passes.py      gradients and measures
metrics.py     accuracy, ROUGE-L, BLEU and loss, as sums that ranks add up
exchange.py    how ranks meet and add up
checkpoint.py  a job's state as bytes and as a file
pace.py        where the time goes, and how much is left
tune.py        the loop
initial.py     the text that a soft prompt begins as, from the bank if it has none
call.py        all of it as a call on a library
result.py      what comes back

`job`, `samples`, `metrics`, `batches`, `pace` and `result` import no PyTorch: a login node reads jobs, data and results
with them.
"""
