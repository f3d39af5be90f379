"""The commands, `mixer COMMAND` or `python -m mixer COMMAND`. Each parses and checks its options,
and only then imports what does the work, which takes seconds:

train           a run, by mixer/training
eval            mixer/evaluation/evaluate.py
generate        mixer/evaluation/generate.py
compare         mixer/comparison
curves          mixer/reporting/curves.py; `report` in earlier versions
inspect         mixer/evaluation/matrices.py
representation  mixer/evaluation/representation.py
convert         mixer/checkpoints/convert.py
export          mixer/checkpoints/export.py
doctor          mixer/ops/diagnosis.py
"""
