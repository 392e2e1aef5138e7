//! The binary: calls [`deltafold::cli::main`].

fn main() -> std::process::ExitCode {
    deltafold::cli::main()
}
