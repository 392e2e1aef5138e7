//! Runs of the program that are ended in the middle of their work by a signal: at each request to a server, or at
//! random moments.

use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt as _;

use super::proxy::{Effect, Proxy, Timing};

/// A run that got a signal, perhaps after its own end.
pub struct Ended {
    /// When it got it, how it ended, and its standard error.
    pub what: String,
    pub status: ExitStatus,
}

impl Ended {
    /// Waits for a run that got a signal, and checks how it ended.
    fn wait(job: Child, signal: Signal, moment: &str) -> Self {
        let ended = job.wait_with_output().expect("the end of a run");
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let what = format!("{moment}: {} {stderr}", ended.status);
        match ended.status.code() {
            // It had finished.
            Some(0) => {}
            Some(143) if signal == Signal::TERM => {}
            // SIGTERM kills it only before it has set up its handler.
            _ => assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{what}"),
        }
        let status = ended.status;
        Self { what, status }
    }
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("start a run")
}

/// Sends a signal to a child that nobody has waited for yet, so the pid is still its own.
pub fn send(job: &Child, signal: Signal) {
    let _ = kill_process(Pid::from_child(job), signal);
}

/// Ends a run at each `stride`-th request to the server at `url`: before the server sees the request, and after it
/// has carried it out. `command` gets the URL of a proxy; `check` looks at what is left and prepares the next run.
/// Prints and returns how many runs were ended.
pub fn at_each_request(
    url: &str,
    signal: Signal,
    stride: usize,
    command: impl Fn(&str) -> Command,
    mut check: impl FnMut(&Ended),
) -> usize {
    let proxy = Proxy::start(url);
    let mut runs = 0;
    for timing in [Timing::Before, Timing::After] {
        for nth in (0..).step_by(stride) {
            let pid = Arc::new(OnceLock::new());
            let of_effect = pid.clone();
            let end = Effect::Do(Arc::new(move || {
                // The request may arrive before its sender is known here.
                let _ = kill_process(*of_effect.wait(), signal);
            }));
            proxy.inject(|_| true, nth, 1, timing, end);
            let job = start(command(&proxy.url()));
            pid.set(Pid::from_child(&job)).expect("a new cell");
            let ended = Ended::wait(job, signal, &format!("{timing:?} request {nth}"));
            let was_struck = proxy.all_faults_struck();
            proxy.clear_faults();
            check(&ended);
            if !was_struck {
                break;
            }
            runs += 1;
        }
    }
    println!("{runs} runs were ended at a request");
    assert!(runs > 4, "hardly a request was sent");
    runs
}

/// Ends runs at random moments, `rounds` times, and more often if none was alive any more. `whole` is the time of a
/// whole run. `moment` waits, and gets what that time is by now: on a busy machine it changes. `check` looks at
/// what is left and prepares the next run. Prints how many runs were ended.
pub fn at_random_moments(
    rounds: usize,
    signal: Signal,
    mut whole: Duration,
    command: impl Fn() -> Command,
    mut moment: impl FnMut(&mut Child, &mut Rng, Duration),
    mut check: impl FnMut(&Ended),
) {
    let mut rng = Rng::with_seed(super::seed());
    let mut killed = 0;
    for round in 0..4 * rounds {
        if round >= rounds && killed > 0 {
            break;
        }
        let mut job = start(command());
        moment(&mut job, &mut rng, whole);
        send(&job, signal);
        let ended = Ended::wait(job, signal, &format!("round {round}"));
        let was_killed = !ended.status.success();
        killed += usize::from(was_killed);
        // In the long run about four in five are ended.
        whole = whole.mul_f64(if was_killed { 1.1 } else { 0.7 });
        check(&ended);
    }
    println!("{killed} runs were ended at a random moment");
    assert!(killed > 0, "no run was ended midway");
}

/// Waits for any moment of a run.
pub fn any_moment(_: &mut Child, rng: &mut Rng, whole: Duration) {
    std::thread::sleep(whole.mul_f64(rng.f64() * 1.1));
}

/// Waits until something holds, or the run has ended.
pub fn wait_until(job: &mut Child, holds: impl Fn() -> bool) {
    while !holds() && job.try_wait().expect("its state").is_none() {
        std::thread::sleep(Duration::from_micros(100));
    }
}
