"""Models in files and on the Hugging Face Hub.

save                save_pretrained: config.json and model.safetensors
weights             where the weights of a saved model are, and whether they are intact
untrusted           what is accepted from an untrusted config.json
cards               model cards
push                push_to_hub
"""
