"""Teach a shared block to follow a pretrained model.

config    the settings of fit, of calibrate_ and of the loss; the names of a run's files
matching  whether student, teacher and loss fit together; which step is to reach which teacher's state
losses    the parts of the loss, and the passes of the student that give them
tasks     TrajectoryDistillationTask: a student follows its teacher's trajectory
loop      the training loop, epoch by epoch: a first batch, timm's optimizers and schedules, validation
fit       fit: a task, for epochs or minutes; its state, saved and resumed
recipe    recipes, in YAML that may be anybody's; those of the package are in recipes/
stages    the stages of a recipe, prepared and trained, and the best of them
run       train: runs a recipe in a folder; calibrate_: the recipe of that name, in memory
"""
