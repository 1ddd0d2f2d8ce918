"""Teach a shared block to follow a pretrained model.

config              the settings of fit, of calibrate_, of the loss and of the data, with their defaults
losses              the parts of the loss
layer_times         where the teacher's layers lie in time, and its states between them
runs                the sequences of blocks that a student follows, and when it is to reach which state
student_teacher     whether student and teacher match, and what both tasks share
stepwise_task       StepwiseTask: each step on its own
trajectory_task     TrajectoryDistillationTask: the whole trajectory, unrolled
validation          what is measured after each epoch, and which of it chooses the best one
first_batch         what fit checks before it trains
monitor             what fit watches besides the loss
fit                 the training loop
resume              what a run saves, and what must be the same when it continues
calibrate           calibrate_: minutes of training, without labels
budget              how many updates fit into some minutes
find_size           find_size: the smallest student that keeps a share of its teacher
hashes, cache       how models and data are recognised; a teacher's states on disk
recipe, read_yaml   recipes (those of the package are in recipes/), and YAML from untrusted sources
loaders             the data of a recipe
run_recipe          train: runs a recipe
ablate              runs several recipes with several seeds, and makes one table
"""
