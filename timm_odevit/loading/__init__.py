"""What a model is loaded from, a folder or the Hub, which may be somebody else's.

find_weights        finds, downloads and checks the weights of a saved model, and checks its config.json
"""
