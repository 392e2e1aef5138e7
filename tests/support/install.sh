# What scripts of the tests install, by name, if it is missing. They source this file and have `say` and `fail`.

# debian_packages PACKAGE…: as root, or by sudo.
debian_packages() {
    local missing=() as_root=() package log
    for package in "$@"; do
        [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) == *"ok installed"* ]] || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    log=$(mktemp)
    { "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
        >"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "cannot install ${missing[*]}: root and Debian's packages are needed"; }
    rm -f "$log"
}

# npm_packages FOLDER PACKAGE@VERSION…: whole or not at all.
npm_packages() {
    local folder=$1 half
    shift
    command -v node >/dev/null && command -v npm >/dev/null || fail "Node and npm are needed for $*"
    [ ! -d "$folder" ] || return 0
    say "installing $*"
    mkdir -p "${folder%/*}"
    half=$(mktemp -d "${folder%/*}/build-npm.XXXXXX")
    npm install --silent --no-audit --no-fund --prefix "$half" "$@" >&2 ||
        { rm -rf "$half"; fail "cannot install $* with npm"; }
    mv -T "$half" "$folder"
}
