#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A root of its own for a real OpenNebula: an overlay over this machine's /, in a mount namespace of its own, so that
# nothing of the machine's /etc, /usr and /var changes. Needs root. Kept below build/real by the version of the source.
#
#   tests/real/root.sh build SRC              build OpenNebula from SRC, a checkout or archive of it at a tag; says where
#   tests/real/root.sh run SRC COMMAND...     run a command there; what it writes, but to this checkout, is gone after it
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
checkout=$(readlink -f "$here/../..")
owner=9869 # of OpenNebula's packages

die() {
    printf 'real-oned: %s\n' "$*" >&2
    exit 1
}

version_of() { # SRC: 7.4.0
    grep -Ex '[0-9.]+' "$1/src/im_mad/remotes/VERSION" 2>/dev/null ||
        die "no OpenNebula in $1: give SRC=<its checkout at a tag>"
}

# Inside of a mount namespace: make an overlay over the machine's root the root.
enter() { # NEW UPPER WORK
    mkdir -p "$1" "$2" "$3"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$2,workdir=$3" "$1"
    local name
    for name in proc sys dev; do mount --rbind "/$name" "$1/$name"; done
    mount --bind "$checkout" "$1$checkout"
    mkdir -p "$1/.old"
    cd "$1"
    pivot_root . .old
    umount -l /.old
    # Of labs outside nothing is seen, and they see none of these.
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/lock /run/one /run/netns
    cd "$checkout"
}

packages() {
    local policy=/usr/sbin/policy-rc.d missing
    mapfile -t missing < <(sed -e 's/#.*//' -e '/^ *$/d' "$here/packages.txt")
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q update
    apt-get -q install -y --no-install-recommends "${missing[@]}"
}

build_inside() { # SRC VERSION
    local source=/srv/one ruby=/usr/lib/one/ruby new paths
    packages
    cp -R --no-preserve=ownership "$1" "$source"
    cd "$source"
    # Without -g and with -O0 it takes a third of the time; what is tested is what it does.
    sed -i -e 's/^ *"-g",$//' -e "s/'-g', '-pthread'/'-pthread'/" SConstruct
    case $2 in
    6.*) new="new_xmlrpc=yes sunstone=no" ;;
    *) new="grpc=no" ;;
    esac
    # shellcheck disable=SC2086 # two words
    CXXFLAGS=-O0 scons -j"$(nproc)" sqlite=yes mysql=no svncterm=no fireedge=no systemd=no $new
    getent group oneadmin >/dev/null || groupadd -g "$owner" oneadmin
    getent passwd oneadmin >/dev/null || useradd -u "$owner" -g oneadmin -d /var/lib/one -s /bin/bash oneadmin
    ./install.sh -u oneadmin -g oneadmin
    cd /
    # Debian's gems in the place of the shipped ones; before 7.0 none are wanted where there is no such folder.
    mkdir -p /usr/share/one /usr/lib/ruby/vendor_ruby
    rm -rf /usr/share/one/gems "$source"
    paths=$(find /usr/lib/one /usr/share/one -name load_opennebula_paths.rb -print -quit)
    if [ -n "$paths" ]; then
        ln -s /usr/share/rubygems-integration/all /usr/share/one/gems
        find /usr/lib/one /usr/share/one -name load_opennebula_paths.rb -exec sed -i 's/^ *Gem.use_paths.*//' {} +
        ln -sf "$paths" /usr/lib/ruby/vendor_ruby/
    fi
    [ -e /usr/lib/ruby/vendor_ruby/parse-cron.rb ] || : >/usr/lib/ruby/vendor_ruby/parse-cron.rb # of backup jobs alone
    apt-get -q clean
    [ -d "$ruby" ] && [ -x /usr/bin/oned ]
}

build() { # SRC
    local version kept new
    version=$(version_of "$1")
    kept=$checkout/build/real/$version
    if [ ! -e "$kept/ready" ]; then
        new=$kept.new
        rm -rf "$kept" "$new"
        mkdir -p "$new"
        unshare --mount --propagation private "$here/root.sh" _build "$new" "$(readlink -f "$1")" "$version" >"$new/log" 2>&1 ||
            die "OpenNebula $version cannot be built: $(tail -n 5 "$new/log") (all of it in $new/log)"
        rm -rf "$new/work" "$new/root"
        : >"$new/ready"
        mv "$new" "$kept"
    fi
    echo "$kept"
}

[ "$(id -u)" = 0 ] || die "must run as root: it makes mounts"
case ${1-} in
build)
    [ $# = 2 ] || die "build SRC"
    build "$2"
    ;;
run)
    [ $# -ge 3 ] || die "run SRC COMMAND..."
    kept=$(build "$2")
    run=$(mktemp -d "$checkout/build/real/run.XXXXXX")
    trap 'rm -rf --one-file-system "$run"' EXIT
    cp -a "$kept/upper" "$run/upper" # no overlay takes what lies below / as a second layer
    unshare --mount --propagation private --kill-child --fork "$here/root.sh" _run "$run" "${@:3}"
    ;;
_build)
    # The source is read before the root is another.
    enter "$2/root" "$2/upper" "$2/work"
    build_inside "$3" "$4"
    ;;
_run)
    enter "$2/root" "$2/upper" "$2/work"
    exec "${@:3}"
    ;;
*) die "build SRC | run SRC COMMAND..." ;;
esac
