"""Teach a shared block to follow a pretrained model.

config              the settings of fit, of calibrate_, of the loss and of the data, with their defaults
losses              the parts of the loss, and the passes of the student that give them
matching            whether student, teacher and loss fit together, and which step is to reach which teacher's state
tasks               StepwiseTask: each step on its own; TrajectoryDistillationTask: the whole trajectory, unrolled
fit                 the training loop
monitor             what surrounds the loop: checks of the first batches, validation, where a loss diverged
resume              what a run saves, and what must be the same when it continues
calibrate           calibrate_: minutes of training, without labels
minutes             training for some minutes
recipe              recipes (those of the package are in recipes/), from YAML that may be anybody's
loaders             the data of a recipe
run_recipe          train: runs a recipe
"""
