"""Models in files and on the Hugging Face Hub.

save                save_pretrained: writes config.json and model.safetensors
find_weights        finds, downloads and checks the weights of a saved model
untrusted           what is accepted from an untrusted config.json
cards               model cards
push                push_to_hub: uploads a model
"""
