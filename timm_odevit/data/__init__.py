"""Images and labels in batches: `read_data` makes a `Data` of whatever there is."""
