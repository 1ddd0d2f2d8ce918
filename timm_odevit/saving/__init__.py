"""Models in files and on the Hugging Face Hub.

save                save_pretrained: writes config.json and model.safetensors
cards               model cards
push                push_to_hub: uploads a model
"""
