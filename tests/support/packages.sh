# What surrounds the commands of docs/guides/install.md and systemd.md when end_to_end/packages.rs runs them on a machine of their own
# (tests/support/machine): `before` prepares it, `after HEADING` checks what the commands below that heading did.
# The work folder is that of the release's files.

say() { printf '== %s\n' "$*"; }
die() { say "FAILED: $*"; exit 1; }

# No `| grep -q`: it ends at the first match, and then the program before it may fail by SIGPIPE.

# within SECONDS COMMAND…: until the command succeeds.
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/tmp/within 2>&1; do
        if [ $SECONDS -ge $end ]; then
            cat /tmp/within
            journalctl --no-pager --lines 40 --unit 'deltafold-*' || true
            die "not within the time: $*"
        fi
        sleep 0.1
    done
}
# is UNIT PROPERTY VALUE
is() { [ "$(systemctl show --property "$2" --value "$1")" = "$3" ]; }
# must COMMAND…
must() { "$@" || die "$*"; }
# fails CODE COMMAND…
fails() {
    local code=0 wanted=$1
    shift
    "$@" >/tmp/fails 2>&1 || code=$?
    [ "$code" = "$wanted" ] || { cat /tmp/fails; die "code $code, not $wanted: $*"; }
}
put() {
    local key value
    key=$(printf '%s' "$1" | base64)
    value=$(printf '%s' "$2" | base64)
    curl --silent --show-error --fail --cacert /etc/etcd/pki/ca.crt --cert /etc/etcd/pki/client.crt --key /etc/etcd/pki/client.key \
        --data "{\"key\":\"$key\",\"value\":\"$value\"}" https://127.0.0.1:2379/v3/kv/put >/dev/null
}
snapshots() { find "$store" -name "$1-*" | wc -l; }
more_than() { [ "$(snapshots "$1")" -gt "$2" ]; }

store=/srv/backups/etcd-main
follower=deltafold-follow@main.service

# named: the paths of the packages' files, as far as names tell.
named() {
    find / -xdev \( -path /test -o -path /proc -o -path /tmp -o -path /var/tmp -o -path /var/cache/man -o -path /var/lib/deltafold/plain \
        -o -path /srv/backups -o -path /var/lib/prometheus -o -path /etc/systemd/system/deltafold-\*.d \) -prune -o -name '*deltafold*' -print | LC_ALL=C sort
}

before() {
    umask 022
    named >/run/named-before
    # The index of manual pages takes longer than all else, and nothing here needs it.
    rm -f /var/lib/man-db/auto-update
    mkdir -p /etc/etcd/pki
    install -m 0644 /test/certs/ca.crt /etc/etcd/pki/ca.crt
    install -m 0644 /test/certs/node.crt /etc/etcd/pki/client.crt
    # As kubeadm leaves it: for root alone.
    install -m 0600 /test/certs/node.key /etc/etcd/pki/client.key
    cat >/run/systemd/system/etcd.service <<'END'
[Service]
Type=notify
ExecStart=/test/etcd --data-dir=/var/lib/etcd-of-the-test \
    --listen-client-urls=https://127.0.0.1:2379 --advertise-client-urls=https://127.0.0.1:2379 \
    --client-cert-auth --trusted-ca-file=/test/certs/ca.crt --cert-file=/test/certs/node.crt --key-file=/test/certs/node.key
END
    systemctl daemon-reload
    systemctl start etcd.service
    put /one 1
    printf '#!/bin/sh\necho "$1" >> /run/alerts\n' >/usr/local/bin/send-alert
    chmod 755 /usr/local/bin/send-alert
    : >/run/alerts
}

after_Tarball() {
    must [ "$(command -v deltafold)" = /usr/local/bin/deltafold ]
    rm -r /usr/local/share/man/man1 /etc/bash_completion.d/deltafold
}

after_Debian_package() {
    must getent passwd deltafold
    must [ "$(stat -c '%U:%G %a' /etc/deltafold)" = 'root:deltafold 750' ]
    must [ "$(stat -c '%U:%G %a' /etc/deltafold/example.env)" = 'root:deltafold 640' ]
    # Nothing runs before it is enabled.
    must [ -z "$(systemctl list-units --all --no-legend 'deltafold-*')" ]

    say "manual pages"
    must man --where deltafold-restore
    local pages=(/usr/share/man/man1/deltafold*.1.gz) said
    must [ ${#pages[@]} -gt 30 ]
    said=$(printf '%s\n' "${pages[@]}" | MANWIDTH=80 xargs -P 4 -I {} man --warnings --local-file {} 2>&1 >/dev/null)
    [ -z "$said" ] || die "man: $said"
    # A command of the examples can be copied.
    MANWIDTH=60 man --local-file /usr/share/man/man1/deltafold-snapshot-follow.1.gz >/tmp/page
    grep -qF 'deltafold snapshot follow --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \' /tmp/page || die 'examples are broken'

    say "completions"
    said=$(bash -c '. /usr/share/bash-completion/completions/deltafold
        COMP_WORDS=(deltafold snap) COMP_CWORD=1
        _deltafold deltafold snap deltafold
        printf "%s\n" "${COMPREPLY[@]}"')
    must [ "$said" = snapshot ]

    say "units"
    local unit units=()
    for unit in follow.service gc.service verify.service status.service gc.timer verify.timer status.timer; do
        units+=("deltafold-${unit%.*}@main.${unit#*.}")
    done
    said=$(systemd-analyze verify --man=yes "${units[@]}" 2>&1 | grep -i deltafold || true)
    [ -z "$said" ] || die "systemd-analyze verify: $said"
    for unit in follow gc verify status; do
        # In tenths: 2.0 at most. Without IPAddressDeny= and PrivateNetwork=, 1.0 and less is out of reach.
        must systemd-analyze security --offline=true --threshold=20 "/usr/lib/systemd/system/deltafold-$unit@.service" >/tmp/security
        tail -n 1 /tmp/security
    done
}

after_Configure() { echo DELTAFOLD_DELTA_PERIOD=1s >>/etc/deltafold/main.env; }

after_kubectl_plugin() {
    kubectl-deltafold --version | grep '^deltafold ' >/dev/null || die 'kubectl-deltafold --version'
    # From here on the package's program.
    rm /usr/local/bin/deltafold /usr/local/bin/kubectl-deltafold
    hash -r
    must [ "$(command -v deltafold)" = /usr/bin/deltafold ]
}

after_Man_pages_and_completions_from_the_program_itself() {
    must [ -s /usr/local/share/man/man1/deltafold-snapshot-follow.1 ]
    rm -r /usr/local/share/man/man1 /etc/bash_completion.d/deltafold
}

after_Enable() {
    within 30 more_than Full 0
    put /two 2
    within 30 more_than Incr 0
    # The follower listens nowhere else and has no rights.
    local pid
    pid=$(systemctl show --property MainPID --value $follower)
    must [ "$(stat -c %U "/proc/$pid")" = deltafold ]
    for line in 'CapBnd:	0000000000000000' 'NoNewPrivs:	1' 'Seccomp:	2'; do
        grep -qx "$line" "/proc/$pid/status" || die "no line $line in /proc/$pid/status"
    done
    local timers=(deltafold-verify@main.timer deltafold-gc@main.timer deltafold-status@main.timer)
    must systemctl is-enabled --quiet $follower "${timers[@]}"
    must systemctl is-active --quiet "${timers[@]}"
}

after_Look() {
    must is deltafold-verify@main.service Result success
    must is deltafold-status@main.service Result success
    must systemctl start deltafold-gc@main.service
    must is deltafold-gc@main.service Result success
    # Not from the journal: a message may come to it after `systemctl start` has ended.
    ! is deltafold-gc@main.service ExecMainExitTimestampMonotonic 0 || die 'gc did not run'
}

# instance NAME LINE…: the settings of main.env and these.
instance() {
    local name=$1
    shift
    { cat /etc/deltafold/main.env; printf '%s\n' DELTAFOLD_CERT=/etc/etcd/pki/client.crt DELTAFOLD_KEY=/run/client.key "$@"; } >"/etc/deltafold/$name.env"
}

after_Alerts() {
    local full
    install -o deltafold -m 0400 /etc/etcd/pki/client.key /run/client.key

    say "a mistake in the settings is not tried again"
    instance wrong 'DELTAFOLD_FULL_SCHEDULE=nonsense'
    systemctl start deltafold-follow@wrong.service
    within 30 systemctl is-failed --quiet deltafold-follow@wrong.service
    must is deltafold-follow@wrong.service ExecMainStatus 64
    must is deltafold-follow@wrong.service NRestarts 0
    within 30 grep -qx deltafold-follow@wrong.service /run/alerts

    say "a folder that is not in ReadWritePaths="
    install -d -o deltafold /srv/elsewhere
    instance elsewhere DELTAFOLD_STORE=/srv/elsewhere
    systemctl start deltafold-follow@elsewhere.service
    within 30 sh -c 'journalctl --unit deltafold-follow@elsewhere.service | grep "Read-only file system.*again_in_seconds"'
    must systemctl is-active --quiet deltafold-follow@elsewhere.service
    must [ -z "$(ls -A /srv/elsewhere)" ]
    systemctl stop deltafold-follow@elsewhere.service
    must is deltafold-follow@elsewhere.service NRestarts 0

    say "an instance without settings"
    fails 1 systemctl start deltafold-follow@none.service
    must is deltafold-follow@none.service AssertResult no

    say "the folder that is always there"
    instance plain DELTAFOLD_STORE=/var/lib/deltafold/plain
    systemctl start deltafold-follow@plain.service
    within 30 sh -c 'ls /var/lib/deltafold/plain/v2 | grep ^Full'
    must [ "$(stat -L -c '%U %a' /var/lib/deltafold/plain)" = 'deltafold 700' ]
    systemctl stop deltafold-follow@plain.service

    say "a damaged backup"
    full=$(find $store -name 'Full-*' -print -quit)
    cp "$full" /run/full
    head -c 300 /run/full >"$full"
    fails 1 systemctl start deltafold-verify@main.service
    must is deltafold-verify@main.service ExecMainStatus 65
    within 30 grep -qx deltafold-verify@main.service /run/alerts
    fails 1 systemctl start deltafold-status@main.service
    must is deltafold-status@main.service ExecMainStatus 65
    within 30 grep -qx deltafold-status@main.service /run/alerts
    cat /run/full >"$full"
    must systemctl start deltafold-verify@main.service
    must systemctl start deltafold-status@main.service

    say "a backup that is too old"
    instance stale DELTAFOLD_MAX_AGE=1ms
    fails 1 systemctl start deltafold-status@stale.service
    must is deltafold-status@stale.service ExecMainStatus 75
    must is deltafold-status@stale.service NRestarts 0
    within 30 grep -qx deltafold-status@stale.service /run/alerts

    say "an outage"
    local before
    before=$(systemctl show --property MainPID --value $follower)
    systemctl stop etcd.service
    must is $follower ActiveState active
    must [ "$(systemctl show --property MainPID --value $follower)" = "$before" ]
    must [ "$(grep -c follow@main /run/alerts)" = 0 ]
    systemctl start etcd.service
    local deltas
    deltas=$(snapshots Incr)
    put /three 3
    within 30 more_than Incr "$deltas"
}

after_Prometheus() {
    local metrics job
    metrics=$(curl --silent --show-error --fail --retry 20 --retry-connrefused --retry-delay 1 http://127.0.0.1:9379/metrics)
    grep -qx 'deltafold_lock_held 1' <<<"$metrics" || die "metrics: $metrics"
    for job in verify gc; do
        metrics=/var/lib/prometheus/node-exporter/deltafold-$job.prom
        must grep -qx "deltafold_job_succeeded{job=\"$job\"} 1" "$metrics"
        # Node exporter is another user.
        must [ "$(stat -c %a "$metrics")" = 644 ]
    done
    must [ -s /usr/share/doc/deltafold/alerts-hosts.yaml ]
}

after_Change_the_times() {
    systemctl show --property TimersCalendar deltafold-verify@main.timer | grep 'Sun' >/dev/null || die 'the time has not changed'
}

before_Upgrade_and_remove() {
    say "a reinstallation restarts the follower"
    local before
    before=$(systemctl show --property MainPID --value $follower)
    chmod 0600 /etc/deltafold/example.env
    dpkg --install ./deltafold_*.deb >/dev/null
    must is $follower ActiveState active
    must [ "$(systemctl show --property MainPID --value $follower)" != "$before" ]
    must [ "$(stat -c '%U:%G %a' /etc/deltafold/example.env)" = 'root:deltafold 600' ]
    # Stopping saves what is not saved, and is no failure.
    put /four 4
    systemctl stop $follower
    must is $follower Result success
    systemctl start $follower
}

after_Upgrade_and_remove() {
    ! systemctl is-active --quiet $follower || die 'the follower still runs'
    local left
    # What was here before belongs to the machine, such as a build of this project.
    left=$(named | comm -13 /run/named-before -)
    [ "$left" = "$(printf '%s\n' /etc/deltafold /var/lib/deltafold)" ] || die "left: $left"
    must [ "$(ls /etc/deltafold | xargs)" = 'elsewhere.env main.env plain.env stale.env wrong.env' ]
    must [ "$(ls -A /var/lib/deltafold)" = plain ]
    more_than Full 0 || die 'the store is gone'
    ! find /etc/systemd -type l -lname '*deltafold*' | grep . || die 'links are left'
}
