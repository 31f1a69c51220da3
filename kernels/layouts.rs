//! Structs that Rust and the device share, checked by the device's compiler.

/// Assertions in C++ that structs have the size, and each of their fields the offset, that they have in
/// Rust: text for the end of a source that includes [`TYPES`](crate::TYPES). A struct that has another
/// name in C++ is followed by it, `as "name"`. Forgetting a field does not compile.
///
/// ```
/// #[repr(C)]
/// struct Range {
///     first: u32,
///     count: u32,
/// }
///
/// let text = graph_ep_kernels::layouts! { Range as "rows::Range" { first, count } };
/// assert!(text.contains("static_assert(sizeof(rows::Range) == 8,"));
/// assert!(text.contains("static_assert(OFFSET_OF(rows::Range, count) == 4,"));
/// ```
///
/// ```compile_fail
/// #[repr(C)]
/// struct Range {
///     first: u32,
///     count: u32,
/// }
///
/// graph_ep_kernels::layouts! { Range { first } };
/// ```
#[macro_export]
macro_rules! layouts {
    (@name $ty:ident) => { ::core::stringify!($ty) };
    (@name $ty:ident $name:literal) => { $name };
    ($($ty:ident $(as $name:literal)? { $($field:ident),* $(,)? })*) => {{
        let mut text = ::std::string::String::new();
        $({
            let (name, size) = ($crate::layouts!(@name $ty $($name)?), ::core::mem::size_of::<$ty>());
            text += &::std::format!("static_assert(sizeof({name}) == {size}, \"{name}\");\n");
            $({
                let field = ::core::stringify!($field);
                let offset = ::core::mem::offset_of!($ty, $field);
                text += &::std::format!(
                    "static_assert(OFFSET_OF({name}, {field}) == {offset}, \"{name}.{field}\");\n"
                );
            })*
            // Names every field, or it does not compile.
            let _ = |value: &$ty| {
                let $ty { $($field: _),* } = value;
            };
        })*
        text
    }};
}
