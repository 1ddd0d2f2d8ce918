"""Teach a shared block to follow a pretrained model.

config              the settings of fit, of calibrate_ and of the loss, with their defaults
losses              the parts of the loss, and the passes of the student that give them
matching            whether student, teacher and loss fit together, and which step is to reach which teacher's state
tasks               StepwiseTask: each step on its own; TrajectoryDistillationTask: the whole trajectory, unrolled
stream              a loader in epochs of any length
optimizer           timm's optimizers and schedules
monitor             what surrounds the loop: checks of the first batches, validation, where a loss diverged
loop                the training loop, epoch by epoch
fit                 fit: a task, for epochs or minutes
resume              what a run saves and plans, and what must be the same when it continues
recipe, yaml_text   recipes (those of the package are in recipes/), from YAML that may be anybody's
stages              the stages of a recipe, and the best of them
run                 train: runs a recipe in a folder
calibrate           calibrate_: the recipe of that name on tensors, in memory
"""
