"""What a producer calls: submit, the job object, conversations."""
