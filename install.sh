#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts semishared into a remotes/ directory of OpenNebula, and takes it out again. `onehost sync` does the rest.
set -eu

usage="usage: install.sh [--remotes DIR] [--dry-run] [--uninstall]

  --remotes DIR  OpenNebula's remotes directory (default: \$ONE_LOCATION/var/remotes or /var/lib/one/remotes)
  --dry-run      say what would change, change nothing
  --uninstall    remove semishared again (a changed etc/semishared.conf stays)"

name=semishared
python=/usr/bin/python3
here=$(cd -- "$(dirname -- "$0")" && pwd)
remotes=${ONE_LOCATION:+$ONE_LOCATION/var/remotes}
remotes=${remotes:-/var/lib/one/remotes}
mode=install
dry=

die() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

say() {
    printf '%s%s\n' "${dry:+would }" "$1"
}

while [ $# -gt 0 ]; do
    case $1 in
    --remotes)
        [ $# -gt 1 ] || die "--remotes needs a directory"
        remotes=$2
        shift
        ;;
    --remotes=*) remotes=${1#*=} ;;
    --dry-run) dry=yes ;;
    --uninstall) mode=uninstall ;;
    -h | --help)
        printf '%s\n' "$usage"
        exit 0
        ;;
    *) die "unknown argument '$1'; --help shows all" ;;
    esac
    shift
done

[ -n "$remotes" ] || die "--remotes needs a directory"
case $remotes in /*) ;; *) remotes=$PWD/$remotes ;; esac
[ -d "$remotes" ] || die "$remotes is not a directory: is OpenNebula installed here? (--remotes DIR)"
[ -f "$remotes/vmm/kvm/deploy" ] || die "$remotes is not a remotes directory of OpenNebula: it has no vmm/kvm/deploy"
if [ -z "$dry" ] && [ ! -w "$remotes" ]; then
    die "$remotes is not writable for $(id -un): run this as root or oneadmin"
fi
if [ $mode = install ]; then
    [ -x "$python" ] || die "$python is missing: install python3 (3.9 or newer)"
    "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' ||
        die "$python is older than 3.9: install a newer python3"
fi

owner=
if [ "$(id -u)" = 0 ] && id oneadmin >/dev/null 2>&1; then
    owner=oneadmin:$(id -gn oneadmin)
fi

umask 022
where=$remotes
[ -z "$dry" ] || where=${TMPDIR:-/tmp}
# What an installer that was killed an hour ago left behind.
[ -n "$dry" ] || find "$remotes" -maxdepth 1 -name ".$name-install.*" -mmin +60 -exec rm -rf -- {} +
stage=$(mktemp -d "$where/.$name-install.XXXXXX") || die "cannot write to $where"
trap 'rm -rf -- "$stage"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mkdir "$stage/old"

# own DIR: give DIR the owner and the modes it is installed with.
own() {
    find "$1" -type d -exec chmod 755 {} +
    [ -z "$owner" ] || chown -R "$owner" "$1"
}

# describe DIR: print every file of DIR with its mode, owner and content; byte code does not count.
describe() {
    (
        cd "$1"
        find . -name __pycache__ -prune -o -printf '%M %u %g %p %l\n' | LC_ALL=C sort
        find . -name __pycache__ -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum
    )
}

# swap PART: put $stage/PART in the place of $remotes/PART, by renaming; an older version goes as a whole.
swap() {
    old=$remotes/$1
    if [ -d "$old" ] && [ ! -L "$old" ] && [ "$(describe "$old")" = "$(describe "$stage/$1")" ]; then
        return
    fi
    changed=yes
    if [ -e "$old" ] || [ -L "$old" ]; then
        say "replace $old"
        [ -z "$dry" ] || diff -rq -x __pycache__ "$old" "$stage/$1" | sed 's/^/  /' || true
    else
        say "make $old"
    fi
    [ -z "$dry" ] || return 0
    if [ ! -d "$(dirname "$old")" ]; then
        mkdir -p "$(dirname "$old")"
        own "$(dirname "$old")"
    fi
    mkdir -p "$stage/old/$1"
    if [ -e "$old" ] || [ -L "$old" ]; then
        mv -T -- "$old" "$stage/old/$1/$name"
    fi
    mv -T -- "$stage/$1" "$old"
}

# remove PART: take $remotes/PART away.
remove() {
    [ -e "$remotes/$1" ] || [ -L "$remotes/$1" ] || return 0
    changed=yes
    say "remove $remotes/$1"
    [ -n "$dry" ] || rm -rf -- "${remotes:?}/$1"
}

# forward ACTION: make the script that hands ACTION over to the stock one beside us.
forward() {
    cat >"$stage/vmm/$name/$1" <<END
#!/bin/sh
# Made by semishared's install.sh: nothing of ours differs for this action.
exec "\$(dirname -- "\$0")/../kvm/$1" "\$@"
END
    chmod 755 "$stage/vmm/$name/$1"
}

changed=
conf=etc/$name.conf
# Where the monitoring of hosts looks for probes, per hypervisor.
probes="im/kvm-probes.d/host/system im/qemu-probes.d/host/system"

# The package comes first and goes last: the actions need it.
if [ $mode = uninstall ]; then
    for part in $probes vmm datastore tm lib; do
        remove "$part/$name"
    done
    if [ -z "$dry" ] && [ -d "$remotes/lib" ]; then
        rmdir --ignore-fail-on-non-empty -- "$remotes/lib"
    fi
    if [ ! -f "$remotes/$conf" ] || cmp -s "$here/$conf" "$remotes/$conf"; then
        remove "$conf"
    else
        printf 'kept %s: it was changed\n' "$remotes/$conf"
    fi
else
    for part in lib tm datastore vmm; do
        from=$here/$part
        [ $part != lib ] || from=$here/lib/$name
        mkdir -p "$stage/$part"
        cp -R --preserve=timestamps -- "$from" "$stage/$part/$name" || die "cannot copy $from"
        find "$stage/$part/$name" -name __pycache__ -prune -exec rm -rf -- {} +
        if [ $part = lib ]; then
            find "$stage/$part/$name" -type f -exec chmod 644 {} +
            # The operator's command lies in its package, so that it is swapped and removed with it.
            cp --preserve=timestamps -- "$here/bin/$name" "$stage/lib/$name/$name" || die "cannot copy $here/bin/$name"
            chmod 755 "$stage/lib/$name/$name"
            # Saves every action 5 ms; rsync keeps the times that make byte code valid on the hosts too.
            "$python" -I -m compileall -q -d "$remotes/lib/$name" "$stage/lib/$name" ||
                die "$python cannot compile the package"
        else
            find "$stage/$part/$name" -type f -exec chmod 755 {} +
        fi
        if [ $part = vmm ]; then
            for stock in "$remotes"/vmm/kvm/*; do
                action=${stock##*/}
                case $action in *[!A-Za-z0-9._-]*) continue ;; esac
                if [ -f "$stock" ] && [ -x "$stock" ] && [ ! -e "$stage/vmm/$name/$action" ]; then
                    forward "$action"
                fi
            done
        fi
        own "$stage/$part/$name"
        swap "$part/$name"
    done
    for part in $probes; do
        probe=$remotes/$part/$name
        if [ -d "$remotes/$part" ] && ! cmp -s "$here/im/$name" "$probe"; then
            changed=yes
            say "make $probe"
            if [ -z "$dry" ]; then
                cp --preserve=timestamps -- "$here/im/$name" "$stage/probe"
                chmod 755 "$stage/probe"
                [ -z "$owner" ] || chown "$owner" "$stage/probe"
                mv -T -- "$stage/probe" "$probe"
            fi
        fi
    done
    if [ -f "$here/$conf" ]; then
        if [ ! -e "$remotes/$conf" ]; then
            changed=yes
            say "make $remotes/$conf"
            if [ -z "$dry" ]; then
                cp -- "$here/$conf" "$stage/$name.conf"
                chmod 644 "$stage/$name.conf"
                [ -z "$owner" ] || chown "$owner" "$stage/$name.conf"
                mkdir -p "$remotes/etc"
                mv -T -- "$stage/$name.conf" "$remotes/$conf"
            fi
        elif ! cmp -s "$here/$conf" "$remotes/$conf"; then
            printf 'kept %s: it was changed (new defaults: %s)\n' "$remotes/$conf" "$here/$conf"
        fi
    fi
fi

if [ -z "$changed" ]; then
    printf 'nothing to do in %s\n' "$remotes"
elif [ -z "$dry" ]; then
    printf 'done; now run as oneadmin: onehost sync --force\n'
    [ $mode = uninstall ] || printf 'the operator command: %s\n' "$remotes/lib/$name/$name"
fi
