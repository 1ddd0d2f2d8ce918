"""Teach a shared block to follow a pretrained model.

config              the settings of fit, of calibrate_, of the loss and of the data, with their defaults
losses              the parts of the loss
checkpoints         where the teacher's layers lie in time, and which step of the student is to reach which state
matching            whether student, teacher and loss fit together
training_passes     the passes of the student that DistributedDataParallel and torch.compile wrap
tasks               StepwiseTask: each step on its own; TrajectoryDistillationTask: the whole trajectory, unrolled
fit                 the training loop
validation          what is measured after each epoch, and the checks of the first batches
monitor             what fit watches besides, and records for TensorBoard
resume              what a run saves, and what must be the same when it continues
calibrate           calibrate_: minutes of training, without labels
find_size           find_size: the smallest student that keeps a share of its teacher
recipe, read_yaml   recipes (those of the package are in recipes/), and YAML from untrusted sources
loaders             the data of a recipe
run_recipe          train: runs a recipe
"""
