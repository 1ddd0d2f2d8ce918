"""What the states do along the way, measured on the map that is deployed; every measure also takes an ordinary ViT.

flow                a model as a sequence of maps of a state; products with their Jacobians
lyapunov            finite-time Lyapunov exponents
lipschitz           local Lipschitz constants, and JaSMin's bound on softmax
spectral_norms      the largest singular value of every weight, cheap enough to watch in training
contraction         how far the last state may move before the class changes; recovery from perturbations
relations           which numbers go with the model being right: AUROC with bootstrap intervals
signals             such numbers, from the logits and from the dynamics
discretisation      the distance from the solution of the ODE
trajectories        speed, angles, likeness of tokens; distance from another model; the class along the way
attention           attention maps of each step, and rollout
similarity          CKA of the states at all pairs of times
projections         trajectories in a plane, tokens as colours
"""
