"""What a reader sees of a run: text for the terminal, a picture, a comparison. Stored records only; nothing runs."""
