"""SageMaker: the entry point of training jobs, the handlers of endpoints, and requests for jobs.

A training script is two lines, in script mode and in a container alike:

    from vramfit.integrations.sagemaker import main
    main()
"""

from vramfit.integrations.sagemaker.entry import main
from vramfit.integrations.sagemaker.handlers import input_fn, model_fn, output_fn, predict_fn

__all__ = ["input_fn", "main", "model_fn", "output_fn", "predict_fn"]
