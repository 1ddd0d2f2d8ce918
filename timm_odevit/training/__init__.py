"""Teach a shared block to follow a pretrained model.

config              the settings of fit, of the loss and of the data
losses              the parts of the loss
checkpoints         where the teacher's layers lie in time
pairs               whether student and teacher match
trajectory          TrajectoryDistillationTask: the whole trajectory, unrolled
stepwise            StepwiseTask: each step on its own
first_batch, state  what fit checks first; what it saves in order to resume
fit                 the training loop
calibrate           calibrate_
cache               a teacher's states on disk
read_yaml, recipe   recipes
loaders, train      run a recipe
ablate              run many
"""
