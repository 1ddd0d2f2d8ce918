"""odevit: the command line. A command is a function; its docstring says what it does and lists its arguments.

start               what runs first, without torch: the commands and how their arguments are read; recipe, script
models              models by name, and what a command writes to
train               shrink, finetune, distill
convert             convert, calibrate, export, push
evaluate            evaluate, halt, benchmark, predict, report
"""
from .start import COMMANDS, main, parser

__all__ = ['COMMANDS', 'main', 'parser']
