"""Other people's loops, made right and fitting: the Hugging Face Trainer and Accelerate; jobs on SageMaker."""
