//! What the types rule out. Each file of `compile_fail/` is a mistake that must not compile, for the
//! reason that stands beside it.

#[test]
fn mistakes_do_not_compile() {
    trybuild::TestCases::new().compile_fail("compile_fail/*.rs");
}
