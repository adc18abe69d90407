"""What a finished, or unfinished, sequence becomes in OpenAI's shapes."""
