"""``python -m d2lpar --download``: fetch Fashion-MNIST into data/."""

import argparse

from .data import ADDRESS, download

parser = argparse.ArgumentParser(prog="python -m d2lpar", description=__doc__)
parser.add_argument("--download", nargs="?", const="data", metavar="FOLDER")
parser.add_argument("--from", dest="url", default=ADDRESS, help="another address")
args = parser.parse_args()
if args.download:
    download(args.download, args.url)
else:
    parser.print_help()
