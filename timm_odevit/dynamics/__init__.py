"""What the states do along the way, measured on the map that is deployed; every measure also takes an ordinary ViT.

flow                a model as a sequence of maps of a state; products with their Jacobians
lyapunov            finite-time Lyapunov exponents
lipschitz           local Lipschitz constants, and JaSMin's bound on softmax
spectral_norms      the largest singular value of every weight, cheap enough to watch in training
discretisation      the distance from the solution of the ODE
"""
