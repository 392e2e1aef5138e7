//! Parse, run, exit code; nothing else.

fn main() -> std::process::ExitCode {
    deltafold::cli::main()
}
