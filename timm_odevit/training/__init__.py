"""Teach a shared block to follow a pretrained model.

config     the settings of fit, of calibrate_ and of the loss, with their defaults
losses     the parts of the loss, and the passes of the student that give them
matching   whether student, teacher and loss fit together, and which step is to reach which teacher's state
tasks      StepwiseTask: each step on its own; TrajectoryDistillationTask: the whole trajectory, unrolled
monitor    what surrounds the loop: the first batch, validation, where a loss diverged, TensorBoard
loop       the training loop, epoch by epoch, with timm's optimizers and schedules
fit        fit: a task, for epochs or minutes
resume     what a run saves and plans, and what must be the same when it continues
recipe     recipes; those of the package are in recipes/
yaml_text  YAML that may be anybody's
stages     the stages of a recipe, and the best of them
run        train: runs a recipe in a folder; calibrate_: the recipe of that name, in memory
"""
