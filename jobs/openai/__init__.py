"""What a body may say and what an answer looks like: OpenAI's shapes, validated."""
