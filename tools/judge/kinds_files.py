"""Kinds of mistakes in files and in how a run continues."""

from tools.judge.kind import DDP, ERROR, NOTE, TRAIN, WARNING, Kind

KINDS = {
    "saved by all ranks": Kind(
        ERROR,
        "All ranks write one file at the same time: it may be torn.",
        "Let rank 0 write, into a file beside it, and rename that.",
        DDP,
    ),
    "checkpoint lacks the optimizer": Kind(
        WARNING,
        "A resume begins without momentum and averages: the loss has a bump there.",
        "Save optimizer.state_dict() as well, and load it.",
        DDP,
    ),
    "checkpoint lacks the schedule": Kind(
        WARNING, "A resume begins the schedule again.", "Save scheduler.state_dict() as well, and load it.", TRAIN
    ),
    "checkpoint lacks the scaler": Kind(
        NOTE,
        "A resume begins with another loss scale and skips some steps.",
        "Save scaler.state_dict() as well, and load it.",
        TRAIN,
    ),
    "checkpoint lacks the random numbers": Kind(
        NOTE,
        "A resume draws other random numbers (dropout, augmentation) than the run would have drawn.",
        "Save torch.get_rng_state() of each rank as well, and set it; or seed by the number of the step.",
        TRAIN,
    ),
    "saved before the last average": Kind(
        WARNING,
        "What is saved is one rank's weights, without what the others learned since the last average.",
        "Save after the last collective over the weights.",
        "recipes/allreduce_resnet/bare.py",
    ),
    "names of the wrapper": Kind(
        NOTE,
        'The names begin with "module.": a plain model of the same kind refuses the file.',
        "Save model.module.state_dict().",
        DDP,
    ),
    "pickle is trusted": Kind(
        WARNING,
        "weights_only=False runs whatever program the file contains.",
        "torch.load(path, weights_only=True), and save tensors and plain values only.",
        DDP,
    ),
    "resume repeats an epoch": Kind(
        WARNING,
        "The continued run reads an epoch again that was done.",
        "Save epoch + 1, the number of the next one.",
        DDP,
    ),
    "resume without optimizer state": Kind(
        WARNING,
        "The continued run begins without momentum and averages.",
        "Load what the optimizer had: optimizer.load_state_dict(...).",
        DDP,
    ),
    "resume at another rate": Kind(
        WARNING,
        "The continued run trains at another rate than the one it continues.",
        "Load the schedule's state.",
        TRAIN,
    ),
}
