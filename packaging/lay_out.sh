#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lay out what a package has, for packages of Debian and of RPM alike: lay_out.sh front-end|node DIR, from the top of the source.
#
# front-end: what install.sh needs, below /usr/share/semishared, and the command. node: what a host needs that `onehost sync` does
# not bring, since root has to put it there.
set -eu
part=$1 root=$2
umask 022

put() { # MODE SOURCE TARGET
    mkdir -p "$root/$(dirname "$3")"
    install -m "$1" "$2" "$root/$3"
}

page() { # PAGE SECTION
    put 644 "$1" "usr/share/man/man$2/${1##*/}"
    gzip -9n "$root/usr/share/man/man$2/${1##*/}"
}

front_end() {
    share=$root/usr/share/semishared
    mkdir -p "$share"
    cp -R tm datastore vmm im bin etc lib install.sh COMMIT "$share/"
    find "$share" -name __pycache__ -prune -exec rm -rf {} +
    # Modes as install.sh gives them: what is started is executable.
    find "$share" -type d -exec chmod 755 {} +
    find "$share/lib" "$share/etc" "$share/COMMIT" -type f -exec chmod 644 {} +
    # What an administrator may start, or copy for root to start.
    chmod 755 "$share/lib/semishared/install/semishared-ram.sh" "$share/lib/semishared/share/as_root.py"
    put 755 packaging/semishared usr/bin/semishared
    for page in share/man/man1/*.1; do
        page "$page" 1
    done
    find share/bash-completion share/fish share/zsh -type f | while read -r words; do
        put 644 "$words" "usr/$words"
    done
    for rules in share/prometheus/* share/grafana/*; do
        put 644 "$rules" "usr/share/semishared/${rules#share/}"
    done
    # Errors and remedies name pages as docs/..., and pages these.
    for page in README.md CHANGELOG.md SECURITY.md CONTRIBUTING.md; do
        put 644 "$page" "usr/share/doc/semishared/$page"
    done
    find docs -name '*.md' -o -name '*.svg' | while read -r page; do
        put 644 "$page" "usr/share/doc/semishared/$page"
    done
}

node() {
    # The package owns command and units: the script is not to copy or remove them.
    sed -e 's|^COMMAND=.*|COMMAND=/usr/sbin/semishared-ram|' -e 's|^UNITS=.*|UNITS=/usr/lib/systemd/system|' \
        -e 's|^PACKAGED=.*|PACKAGED=yes|' lib/semishared/install/semishared-ram.sh >"$root/.ram"
    put 755 "$root/.ram" usr/sbin/semishared-ram
    page packaging/semishared-ram.8 8
    for unit in semishared-ram semishared-ram-watch; do
        sed -e 's|/usr/local/sbin/|/usr/sbin/|' -e 's|^# Installed on a host.*|# Started by: semishared-ram enable.|' \
            "lib/semishared/install/$unit.service" >"$root/.ram"
        put 644 "$root/.ram" "usr/lib/systemd/system/$unit.service"
    done
    rm "$root/.ram"
    put 644 packaging/semishared-node.tmpfiles usr/lib/tmpfiles.d/semishared-node.conf
}

mkdir -p "$root"
case $part in
front-end) front_end ;;
node) node ;;
*) exit 2 ;;
esac
