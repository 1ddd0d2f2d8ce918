"""odevit: the command line. A command is a function, whose docstring says its arguments, one each line:

name  help                      also [name] for one that may be left out, name... for one or more
--name  help                    a flag
--name PLACE [default]  help    an option with a value, whose type the placeholder says; PLACE* may be repeated
--name                          as in SHARED, for what several commands have
+module.Class  title            an option for each setting of a class

start               what runs first, without torch: the commands and their arguments; recipe, script
models              models by name, and what a command writes to
train               shrink, finetune, distill
convert             convert, calibrate, export, push
evaluate            evaluate, halt, benchmark
predict             predict, report
"""
from .start import COMMANDS, main, parser

__all__ = ['COMMANDS', 'main', 'parser']
