"""Convert checkpoints from and to the reference implementation of masked mixers, with the same
logits, or between full mixing weights and weights by lag.

    mixer convert FILE --output DIR [--tokenizer NAME] [--mixing KIND]
    mixer convert DIR --output FILE --back
    mixer convert DIR --output DIR --mixing-weight lags

The first line reads a .safetensors file, the weights of a LanguageMixer or of a structured mixer,
Toeplitz or recurrent. The second writes such a file. The third stores one number per lag, the mean
of each diagonal, and prints how much the weights changed. `full` converts back without a change.

A LanguageMixer's file does not say whether the mixing has a softmax, which is not supported here:
the command assumes none, and says so. A structured mixer's file does not say how its heads mix:
give --mixing. See mixer/checkpoints/reference_format.py.
"""

from mixer.checkpoints.model_files import check_new_weights, check_weights_file, existing
from mixer.common.errors import command_parser, run_command
from mixer.common.files import as_path, check_new
from mixer.models.masked_mixer.model_options import RECURRENT


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer convert", __doc__)
    add = parser.add_argument
    one = parser.add_mutually_exclusive_group()
    add("source", type=as_path, help="the author's .safetensors file, or a checkpoint")
    add("--output", type=as_path, required=True, help="a new directory; a new file with --back")
    one.add_argument("--tokenizer", metavar="NAME", help="directory or hub name; saved too")
    one.add_argument("--back", action="store_true", help="write a file for the author's code")
    one.add_argument("--mixing-weight", choices=["full", "lags"], help="write weights of this form")
    add("--mixing", choices=("lags", *RECURRENT), help="how the heads of a structured mixer mix")
    options = parser.parse_args(arguments)
    output = options.output
    reads_checkpoint = options.back or options.mixing_weight
    if options.mixing and reads_checkpoint:
        parser.error("--mixing is for the author's files: leave out --back and --mixing-weight")
    if options.back:
        check_new_weights(output)
    else:
        check_new(output)
    if reads_checkpoint:
        source = existing(options.source)
    else:
        source = options.source
        check_weights_file(source)
    # Only now, as this takes seconds.
    from mixer.checkpoints.convert import convert, convert_back, convert_mixing

    if options.mixing_weight:
        convert_mixing(source, output, options.mixing_weight)
    elif options.back:
        convert_back(source, output)
    else:
        convert(source, output, options.tokenizer, options.mixing)


if __name__ == "__main__":
    run_command(main)
