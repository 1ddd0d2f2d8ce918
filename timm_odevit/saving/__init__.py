"""Models in files and on the Hugging Face Hub.

save                save_pretrained: config.json and model.safetensors
weights             where the weights of a saved model are, and whether they are whole
untrusted           what is accepted from a stranger's config.json
cards               the card of a model
push                push_to_hub
"""
