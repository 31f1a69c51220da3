//! The list of checks, and the tests made of it.

/// Makes a `#[test]` of every check, for one backend. `$backend` is named by an absolute path.
///
/// ```ignore
/// graph_ep_tests::conformance_suite!(host_threads, graph_ep_tests::HostThreads);
/// ```
#[macro_export]
macro_rules! conformance_suite {
    ($suite:ident, $backend:ty) => {
        mod $suite {
            $crate::conformance_suite! { @group $backend, modes:
                eager_equals_the_oracle,
            }
        }
    };
    (@group $backend:ty, $group:ident: $($check:ident),* $(,)?) => {
        mod $group {
            $(
                #[test]
                fn $check() {
                    $crate::checks::$group::$check::<$backend>();
                }
            )*
        }
    };
}
