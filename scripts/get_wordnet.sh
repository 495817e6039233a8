#!/usr/bin/env bash
# WordNet 3.0 for nltk's METEOR from Debian's packages, for where nltk's own server cannot be reached.
# Usage: scripts/get_wordnet.sh [folder] [folder of the .deb files]
#   folder: one that nltk searches; default $NLTK_DATA, else ~/nltk_data. WordNet goes into its corpora/wordnet
#   folder of the .deb files: wordnet-base_*.deb and wordnet-sense-index_*.deb, if you already have them;
#                             else they are downloaded by apt-get (nothing is installed, root is not needed)
set -euo pipefail

data=${1:-${NLTK_DATA:-$HOME/nltk_data}}
target=$data/corpora/wordnet
if [ -f "$target/lexnames" ]; then
  echo "$target: there already"
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -ge 2 ]; then
  cp "$2"/wordnet-base_*.deb "$2"/wordnet-sense-index_*.deb "$work"
else
  (cd "$work" && apt-get download -q wordnet-base wordnet-sense-index) || {
    echo "error: apt-get cannot download wordnet-base and wordnet-sense-index; get both .deb files from a Debian" \
      "mirror in another way and call: $0 $data FOLDER" >&2
    exit 2
  }
fi
for package in "$work"/*.deb; do
  dpkg-deb -x "$package" "$work"
done

# The numbers and names of WordNet's files of nouns, verbs, ... (1 noun, 2 verb, 3 adjective, 4 adverb): lexnames(5WN).
number=0
for name in adj.all:3 adj.pert:3 adv.all:4 noun.Tops:1 noun.act:1 noun.animal:1 noun.artifact:1 noun.attribute:1 \
  noun.body:1 noun.cognition:1 noun.communication:1 noun.event:1 noun.feeling:1 noun.food:1 noun.group:1 \
  noun.location:1 noun.motive:1 noun.object:1 noun.person:1 noun.phenomenon:1 noun.plant:1 noun.possession:1 \
  noun.process:1 noun.quantity:1 noun.relation:1 noun.shape:1 noun.state:1 noun.substance:1 noun.time:1 \
  verb.body:2 verb.change:2 verb.cognition:2 verb.communication:2 verb.competition:2 verb.consumption:2 \
  verb.contact:2 verb.creation:2 verb.emotion:2 verb.motion:2 verb.perception:2 verb.possession:2 verb.social:2 \
  verb.stative:2 verb.weather:2 adj.ppl:3; do
  printf '%02d\t%s\t%s\n' "$number" "${name%:*}" "${name#*:}"
  number=$((number + 1))
done > "$work/usr/share/wordnet/lexnames"

mkdir -p "$(dirname "$target")"
rm -rf "$target.new"
cp -r "$work/usr/share/wordnet" "$target.new"
rm -rf "$target" # what is there is incomplete
mv "$target.new" "$target"
echo "$target: ready"
